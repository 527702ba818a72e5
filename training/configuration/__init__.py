"""What a command line and its configuration say: names, checks, resolvers, making objects."""
