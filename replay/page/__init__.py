"""What the page of `kvslotctl replay --html` is made of; its face is `kvslot.replay.report`.

html.py      elements with everything from outside escaped
figures.py   the table's lines: name, unit, definition, which way is better
views.py     rows sorted into what stands side by side
findings.py  what the rows say, in sentences
packing.py   series and pictures, made small
tables.py    the parts of the page that need no script
page.*       the frame, its looks, and the script that draws plots and pictures
"""
