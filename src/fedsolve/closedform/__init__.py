"""Methods that are solved, not descended: numpy and scipy, float64."""
