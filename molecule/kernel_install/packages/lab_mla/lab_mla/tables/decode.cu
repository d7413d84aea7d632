// Not Python, and still part of the package.
