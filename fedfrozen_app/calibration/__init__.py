"""How sure a finished run's model is: a temperature, and prediction sets of a stated coverage."""
