"""Aligns separately trained image and text encoders into a dual encoder."""
