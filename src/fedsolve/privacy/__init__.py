"""Sums that show nothing but the sum: numbers in a ring, masks that cancel, keys shared among sites.

    ring        terms in fixed point, added modulo 2^128 or 2^64
    layout      which arrays a sum has, and in how many limbs each of them travels
    sizes       exponents for one limb, and whether a total is known well enough
    shamir      secrets that a threshold of holders can give back
    masking     the client's side: keys, masked terms, help to open a total
    unmasking   the server's side: notes passed on, terms added, masks removed
    notes       what the two sides tell each other, as bytes
    streams     masks drawn from a key and added to a vector
    signatures  who is who: key messages signed with P-384
    primitives  the functions of the library `cryptography` used here

Nothing here knows a network, and nothing is imported before it is used: cryptography is an optional extra.
"""

MISSING_LIBRARY = (
    "secure sums need the library cryptography, which is not installed. "
    "Install it: pip install 'fedsolve[privacy]'."
)
