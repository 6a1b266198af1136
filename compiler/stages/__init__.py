"""The pipeline: each module or package is one stage and one rule."""
