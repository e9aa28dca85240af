"""`gspo doctor`: a recipe looked over before it costs anything. See docs/doctor.md."""
