"""Text corpora, stored by TFDS as ArrayRecord files and read without TensorFlow."""
