// SPDX-License-Identifier: Apache-2.0
// Shared by the storages behind HTTP: range requests, and parsing of headers and listings.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "lib/base/storage/http.h"
#include "lib/base/storage/storage.h"

namespace reshard {

// Adds the headers of a GET for the bytes [offset, offset + length), pinned to `version` if it is not empty.
void add_range(HttpHeaders& headers, Index offset, Index length, const std::string& version);

// Returns the object that the reply to a GET of its first byte describes; nothing unless the status is 200, 206 or 416.
std::optional<StoredObject> object_of(const HttpReply& reply, const std::string& name);

// Sends a GET and follows up to 5 redirects. Only the host of `url` receives `authorization`. Sets `final_url`, which
// may be null, to the last URL. Refuses a redirect from https to http.
Result<HttpReply> get_following(const std::string& what, std::string url, const HttpHeaders& headers,
                                const std::string& authorization, MutableBytes into, std::string* final_url = nullptr);

// Returns whether a reply is the requested range of that version; false for an error that the storage explains. Fails
// (I/O) if the object was replaced or removed, or if the server does not support ranges.
Result<bool> check_range(const HttpReply& reply, const StoredObject& object, Index offset);

// Parses "2026-01-31T12:00:00.000Z" or "Sat, 31 Jan 2026 12:00:00 GMT" to nanoseconds since 1970; 0 for other texts.
Index parse_time(std::string_view text);

// Returns the text of the first element `name`, with entities replaced; nothing if there is none. Listings are flat, so
// they need no more of XML.
std::optional<std::string> xml_text(std::string_view xml, std::string_view name);
// Calls `each` with the content of each element `name`.
void for_each_xml(std::string_view xml, std::string_view name, const std::function<void(std::string_view)>& each);

// Returns a server's error, shortened and safe for a terminal: "HTTP 503 SlowDown: Please reduce your request rate".
std::string status_text(const HttpReply& reply, std::string_view code, std::string_view message);

// Open one kind of storage each; open_storage() chooses.
Result<std::unique_ptr<Storage>> open_bucket(const std::string& root);
Result<std::unique_ptr<Storage>> open_hub(const std::string& root);
Result<std::unique_ptr<Storage>> open_web(const std::string& root);

}  // namespace reshard
