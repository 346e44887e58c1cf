"""A model that is spread over devices: a process for each, of which the first leads and the others follow.

The first has the loop of turns. Each step of its model is an order, which all processes take at the same time; in its
passes they exchange what transformers' plan of the model says. It imports the other files of ``process``. Read
``orders.py`` first.
"""
