"""The HTTP API under ``/api``: JSON, with the verbs of the page and of the commands.

- ``operations`` is the one table: from it come the routes, the checks of what is given, the description and the docs;
- ``calls`` are the functions behind it, ``entries`` those about one entry, ``parameters`` what a client gives;
- ``schemas`` makes JSON Schemas of our types, ``description`` the OpenAPI document;
- ``api`` leads a request to an operation, and makes a problem of an error.
"""
