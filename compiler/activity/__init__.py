"""What a model does on calibration text: its layers run one by one, what goes through them is counted."""
