"""What the user asked: dataclasses, their parsing and their validation. No torch objects, no I/O but reading files."""
