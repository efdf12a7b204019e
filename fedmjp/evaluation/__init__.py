"""What a trained model is worth: accuracy, and how far it is moved by a jigsaw."""
