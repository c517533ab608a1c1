"""The paper as data: its tables, figures and claims, and what is measured for them at a scale."""
