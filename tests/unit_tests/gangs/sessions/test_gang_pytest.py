"""What pytest itself offers, on gangs as without them."""

from __future__ import annotations

from pathlib import Path

from gang_suite import Suite

EVERYTHING = '''
    """A docstring with an example.

    >>> 1 + 1
    2
    """
    import logging
    import os
    import sys
    import unittest
    import warnings

    import pytest


    def twice(number):
        """Double.

        >>> twice(2)
        5
        """
        return 2 * number


    @pytest.fixture(scope="module")
    def module_thing(request):
        request.addfinalizer(lambda: print("module thing down"))
        return "thing"


    @pytest.fixture(params=["a", "b"])
    def letter(request):
        return request.param


    @pytest.fixture
    def breaks_down():
        yield
        raise OSError("no teardown")


    @pytest.fixture
    def breaks_up():
        raise OSError("no setup")


    def test_passes(module_thing, letter):
        assert module_thing + letter in ("thinga", "thingb")


    def test_fails():
        assert [1, 2] == [1, 3], "not the same"


    def test_raises():
        raise ValueError("two\\nlines")


    def test_setup_error(breaks_up):
        pass


    def test_teardown_error(breaks_down):
        pass


    def test_fails_and_teardown_error(breaks_down):
        raise KeyError("both")


    def test_skips():
        pytest.skip("not today")


    @pytest.mark.skipif(sys.version_info > (3,), reason="too new")
    def test_skipif():
        raise AssertionError


    @pytest.mark.xfail(reason="known")
    def test_xfail():
        raise ValueError


    @pytest.mark.xfail(raises=KeyError)
    def test_xfail_of_another_kind():
        raise ValueError


    @pytest.mark.xfail
    def test_xpass():
        pass


    @pytest.mark.xfail(strict=True)
    def test_xpass_strict():
        pass


    @pytest.mark.xfail(run=False)
    def test_xfail_not_run():
        os._exit(1)


    def test_xfail_called():
        pytest.xfail("said so")


    def test_properties(record_property):
        record_property("colour", "blue")
        record_property("size", 3)


    def test_caplog(caplog):
        logging.getLogger("x").warning("heard")
        assert caplog.messages == ["heard"]


    ALONE = logging.getLogger("alone")
    ALONE.propagate = False
    MINE = logging.NullHandler()


    def test_logger_that_does_not_propagate(caplog):
        ALONE.error("heard alone")
        ALONE.handlers.clear()
        ALONE.addHandler(MINE)
        assert caplog.messages == ["heard alone"]


    def test_logger_after_its_handlers_were_cleared(caplog):
        ALONE.error("heard again")
        ALONE.propagate = True
        assert ALONE.handlers[0] is MINE
        assert caplog.messages == ["heard again"]
        caplog.handler.setLevel("CRITICAL")


    def test_logger_that_propagates_again(caplog):
        logging.getLogger("alone.new").propagate = False
        ALONE.error("heard once")
        logging.getLogger("x").warning("not heard: the level of the handler was raised")
        assert ALONE.handlers == [MINE]
        assert caplog.messages == []


    def test_output():
        print("printed")
        os.write(1, b"written\\n")
        logging.getLogger("x").error("logged")
        raise RuntimeError("after output")


    def test_warns():
        warnings.warn("careful")
        warnings.warn("old", DeprecationWarning)


    @pytest.mark.filterwarnings("error:careful")
    def test_warning_is_error():
        warnings.warn("careful")


    def test_subtests(subtests):
        for i in range(3):
            with subtests.test("case", i=i):
                assert i != 1
        with subtests.test("skipped"):
            pytest.skip("this one")


    class TestUnit(unittest.TestCase):
        @classmethod
        def setUpClass(cls):
            cls.numbers = [1]

        def setUp(self):
            self.numbers.append(2)

        def test_state(self):
            self.assertEqual(self.numbers[:2], [1, 2])

        def test_fails(self):
            self.assertEqual(1, 2)

        def test_sub(self):
            for i in range(3):
                with self.subTest(i=i):
                    self.assertNotEqual(i, 1)

        @unittest.skip("unit")
        def test_skip(self):
            pass

        def test_skip_called(self):
            self.skipTest("later")

        @unittest.expectedFailure
        def test_expected(self):
            self.fail()


    class TestBrokenUnit(unittest.TestCase):
        @classmethod
        def tearDownClass(cls):
            raise OSError("class down")

        def test_one(self):
            pass
'''


def test_every_outcome_is_as_in_plain_pytest(tmp_path: Path) -> None:
    """Lines, JUnit, summary and warnings; the two runs differ in nothing but times and ours."""
    suite = Suite(tmp_path).write(
        test_everything=EVERYTHING,
        test_skipped_module="""
            import pytest

            pytest.skip("the whole of it", allow_module_level=True)
            """,
        test_error_after="""
            import pytest

            @pytest.fixture(scope="session", autouse=True)
            def whole():
                yield
                raise OSError("session down")

            def test_last():
                pass
            """,
    )
    options = ("-v", "-rA", "--doctest-modules", "-o", "junit_logging=all")
    plain = suite.run(*options, "--junitxml=plain.xml")
    gang = suite.run(*options, "--junitxml=gang.xml", "--ranks=2")
    # Plain pytest captures its own lines about subtests of unittest.
    lines = [line for line in gang.lines if "::test_sub SUB" not in line]
    assert lines == [line for line in plain.lines if "::test_sub SUB" not in line]
    assert len(gang.lines) == len(lines) + 3 > 40
    assert suite.junit("gang.xml") == suite.junit("plain.xml")
    assert (gang.returncode, gang.summary) == (plain.returncode, plain.summary)
    assert "test_everything.py::test_last" not in gang.stdout
