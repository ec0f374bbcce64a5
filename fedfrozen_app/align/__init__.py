"""Making a dual encoder out of an image and a text encoder that have never met."""
