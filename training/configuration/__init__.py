"""A command line and its configuration: names, checks, resolvers, making objects."""
