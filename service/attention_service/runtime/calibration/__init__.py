"""Calibration: requests drawn at random are run on the device, and a clock is fitted to the time they took."""
