import ringspan as rs
from ringspan.draw import draw_pattern, draw_schedule
from ringspan.oracle import multiplicity


def test_a_picture_shows_the_counts_of_every_head() -> None:
    pattern = rs.Dilated((4, 8), (1, 2))
    figure = draw_pattern(pattern, 16, 2, causal=True)
    count = multiplicity(pattern, 16, 2, causal=True)
    for head, axis in enumerate(figure.axes):
        assert axis.get_title() == f"KV head {head}"
        (mesh,) = axis.collections
        assert mesh.get_array().reshape(16, 16).tolist() == count[head].tolist()
    assert figure.get_suptitle() == "segments x rates: 4 x 1, 8 x 2, causal, n = 16"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["not seen", "counts once", "counts twice"]


def test_a_schedule_names_whose_rows_arrive_when() -> None:
    figure = draw_schedule(rs.plan(rs.Full(), 4096, ring_size=3, layout="contiguous", causal=True))
    texts = [text.get_text() for text in figure.axes[0].texts]
    none = "nothing to compute"
    assert texts[0] == "1 tiles\n11.1% of all work"
    assert texts[1:3] == [none, none]
    assert texts[4:6] == ["rows of rank 0\n5.3 MiB\n22.2% of all work", none]
    assert [text.split("\n")[0] for text in texts[6:]] == ["1 tiles", "rows of rank 1", "rows of rank 0"]
