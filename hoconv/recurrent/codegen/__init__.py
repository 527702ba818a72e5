"""From programs to source code: where values are, loops over features, expressions, targets."""
