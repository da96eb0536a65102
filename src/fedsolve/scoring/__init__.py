"""Scores of models on rows: evaluation, importance of columns, calibration and choice on rows held out."""
