"""`gspo doctor`: pre-flight checks of a recipe. See docs/doctor.md."""
