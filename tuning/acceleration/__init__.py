"""How a run is made fast: plugins hand values to the framework, which seats them."""
