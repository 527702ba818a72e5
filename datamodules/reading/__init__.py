"""Reading files: decoding images, a cache on disk, and what is left out, by name."""
