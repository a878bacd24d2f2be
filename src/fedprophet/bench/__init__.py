"""What `fedprophet bench` measures: rounds on each engine (`rounds`), and growing populations (`growth`)."""
