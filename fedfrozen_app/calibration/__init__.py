"""Calibration of a finished run's model: a temperature, and prediction sets with a stated coverage."""
