"""Real data: the telephone calls that were recorded in another unit (test T10)."""

from benchmarks.contaminated_real_data import phones


def test_exactly_the_years_recorded_in_another_unit_are_found():
    found = phones()
    # R's help on MASS::phones: minutes instead of numbers of calls from 1964 to 1969 and for parts
    # of 1963 and 1970. Of 1963 too little to be seen.
    assert found["years"] == list(range(1964, 1971))
