// SPDX-License-Identifier: Apache-2.0
// Presigned URLs, whose query is a secret: it is kept here, and the rest of the program sees the URL without it.
#pragma once

#include <string>

namespace reshard {

// Remembers the query of a URL of the web and returns the URL without it,
// which is what the program passes on and shows. Other texts are returned as they are.
std::string without_secret_query(const std::string& url);
// Returns the query that was remembered for a URL, with its question mark; empty if there is none. Thread-safe.
std::string secret_query_of(const std::string& url);

}  // namespace reshard
