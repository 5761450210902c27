"""Ready-to-run training recipes: data, models and the training program."""
