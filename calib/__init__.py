"""Train, calibrate, measure and report. Imports data only."""
