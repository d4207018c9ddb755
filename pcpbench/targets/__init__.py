"""What can be put on the stand, behind one protocol."""
