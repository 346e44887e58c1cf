"""Random inputs for every reader of what a caller sends: ``make fuzz`` (atheris), and a short run in the tests."""
