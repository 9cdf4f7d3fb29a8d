"""Tests mirror ``tuning/`` file for file."""
