"""The page in a real Chromium: a person clicks, and Redis shows what came of it.

::

    shop       the app of the tests, as workers, beats and the page load it
    furnished  entries with a past of some weeks, for tests that only look
    views      every view of the page by name, with what a person sees there
"""
