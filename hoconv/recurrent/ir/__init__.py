"""The intermediate representation, and what its ops mean."""
