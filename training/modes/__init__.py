"""Trains, tests, predicts or exports, as `mode` says."""
