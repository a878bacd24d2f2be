"""`fedprophet reproduce`: every table and figure of the paper's evaluation as an experiment with a name."""
