"""One file an operator, under its name: ``draw(draw, program)`` makes a case of it."""
