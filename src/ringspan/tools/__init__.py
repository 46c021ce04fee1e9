"""What only the command line needs: verify, bench, rehearse, spot checks, doctor, pages. Nothing else imports it."""
