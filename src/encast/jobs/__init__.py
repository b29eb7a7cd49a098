"""Batch jobs: rows of files in, answers out, over one engine or many.

``encast run`` over a file asks for ``answers`` alone. A job over many files cuts them into shards (``job``), keeps what
is finished in a folder (``folder``), and has an executor run what is left (``run``): ``local`` does so in this process,
``encast.cluster`` on a Ray cluster. Every byte of the output is written by a ``worker``, whichever executor asks it.
"""
