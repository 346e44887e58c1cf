"""Published results of models that others trained, beside the same numbers asked over HTTP.

Each module named in ``__main__`` is one result: a package of the package index with a trained model in its wheel, the
package's own numbers, and this server's. ``docs/examples.md`` lists them.
"""
