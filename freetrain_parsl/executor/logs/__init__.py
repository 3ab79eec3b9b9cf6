"""The logs of trainings: what they print, wherever they run, as one file in order for each."""
