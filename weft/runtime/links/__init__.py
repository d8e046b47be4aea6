"""How ranks communicate: the Transport and its kinds."""
