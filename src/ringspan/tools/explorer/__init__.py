"""The explorer: a page that shows a pattern, its layout and its ring, computed by the planner in the browser.

`settings`, `views` and `baselines` run in the page: integers only, no torch. `site` puts the page together, `server`
serves it on this machine.
"""
