"""The judge: rebuilds what a step should have been and says what a record got wrong.

It reads plans and records only. It never imports what it judges (engine, model, device), so that a
mistake over there cannot be repeated here.
"""
