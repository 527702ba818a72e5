"""One file for each operator, under its name: ``draw(draw, program, invalid)`` draws a call."""
