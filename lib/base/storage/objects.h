// SPDX-License-Identifier: Apache-2.0
// What storages behind HTTP have in common: ranges of objects, and what headers and listings say of them.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "lib/base/storage/http.h"
#include "lib/base/storage/storage.h"

namespace reshard {

// Headers of a GET for the bytes [offset, offset + length), pinned to a version if it is not empty.
void add_range(HttpHeaders& headers, Index offset, Index length, const std::string& version);

// The object that a reply to a GET of its first byte describes; nothing if the reply is neither of 200, 206 and 416.
std::optional<StoredObject> object_of(const HttpReply& reply, const std::string& name);

// Follows redirects of a GET to the reply that is none, up to 5. `authorization` stays with the host of `url`: another
// one that it leads to gets none. `final_url` (may be null) is where it ended. Refuses to leave https.
Result<HttpReply> get_following(const std::string& what, std::string url, const HttpHeaders& headers,
                                const std::string& authorization, MutableBytes into, std::string* final_url = nullptr);

// Whether a reply is the range that was asked for, of that version. An I/O error if the object was replaced or is gone,
// or the server does not know ranges; nothing if the reply is another error, which the storage explains.
Result<bool> check_range(const HttpReply& reply, const StoredObject& object, Index offset);

// Nanoseconds since 1970 of "2026-01-31T12:00:00.000Z" or "Sat, 31 Jan 2026 12:00:00 GMT"; 0 of other texts.
Index parse_time(std::string_view text);

// The text of the first element of that name, with its entities replaced; nothing if there is none. A listing is flat,
// so that this is all of XML that it takes.
std::optional<std::string> xml_text(std::string_view xml, std::string_view name);
// Calls `each` with what is inside each element of that name.
void for_each_xml(std::string_view xml, std::string_view name, const std::function<void(std::string_view)>& each);

// "HTTP 503 SlowDown: Please reduce your request rate": what a server said, short and safe for a terminal.
std::string status_text(const HttpReply& reply, std::string_view code, std::string_view message);

// Of one kind each (storage.cc tells which).
Result<std::unique_ptr<Storage>> open_bucket(const std::string& root);
Result<std::unique_ptr<Storage>> open_hub(const std::string& root);
Result<std::unique_ptr<Storage>> open_web(const std::string& root);

}  // namespace reshard
