"""The planner against published figures: `python -m bench planner`, docs/validation.md."""
