// SPDX-License-Identifier: Apache-2.0
#include "lib/base/storage/objects.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <ctime>

#include "lib/base/text.h"

namespace reshard {
namespace {

Index number_in(std::string_view text) {
  Index out = -1;
  (void)std::from_chars(text.data(), text.data() + text.size(), out);
  return out;
}

// Returns the object's size from a Content-Range header, "bytes 0-0/123" or "bytes */0"; -1 if it has none.
Index total_of(const HttpReply& reply) {
  const std::string_view range = reply.header("content-range");
  const std::size_t slash = range.rfind('/');
  if (slash != std::string_view::npos) return number_in(range.substr(slash + 1));
  return reply.status == 200 ? number_in(reply.header("content-length")) : -1;
}

std::string unescaped(std::string_view text) {
  static constexpr std::pair<std::string_view, char> kEntities[] = {
      {"&amp;", '&'}, {"&lt;", '<'}, {"&gt;", '>'}, {"&quot;", '"'}, {"&apos;", '\''}};
  std::string out;
  while (!text.empty()) {
    const auto* const entity = std::find_if(std::begin(kEntities), std::end(kEntities),
                                            [&](const auto& e) { return text.starts_with(e.first); });
    if (entity != std::end(kEntities)) {
      out += entity->second;
      text.remove_prefix(entity->first.size());
      continue;
    }
    const std::size_t end = text.starts_with("&#") ? text.find(';') : std::string_view::npos;
    if (end != std::string_view::npos) {
      const bool is_hex = text.size() > 2 && (text[2] == 'x' || text[2] == 'X');
      unsigned value = 0;
      const std::string_view digits = text.substr(is_hex ? 3 : 2, end - (is_hex ? 3 : 2));
      (void)std::from_chars(digits.data(), digits.data() + digits.size(), value, is_hex ? 16 : 10);
      if (value > 0 && value < 0x80) out += static_cast<char>(value);  // servers escape no other characters
      text.remove_prefix(end + 1);
      continue;
    }
    out += text.front();
    text.remove_prefix(1);
  }
  return out;
}

}  // namespace

void add_range(HttpHeaders& headers, Index offset, Index length, const std::string& version) {
  headers.emplace_back("range", "bytes=" + std::to_string(offset) + "-" + std::to_string(offset + length - 1));
  if (!version.empty() && !version.starts_with("W/")) headers.emplace_back("if-match", version);
}

std::optional<StoredObject> object_of(const HttpReply& reply, const std::string& name) {
  if (reply.status != 200 && reply.status != 206 && reply.status != 416) return std::nullopt;
  StoredObject out;
  out.entry.name = name;
  out.entry.size = std::max<Index>(0, total_of(reply));
  out.entry.mtime_ns = parse_time(reply.header("last-modified"));
  out.version = reply.header("etag");
  return out;
}

namespace {

// Returns the target of a redirect: resolves `location`, which may be relative, against `url`.
std::string resolved(const std::string& url, std::string_view location) {
  if (location.find("://") != std::string_view::npos) return std::string(location);
  const HttpUrl from = split_http_url(url);
  const std::string host = std::string(from.scheme) + "://" + std::string(from.host);
  if (location.starts_with("//")) return std::string(from.scheme) + ":" + std::string(location);
  if (location.starts_with('/')) return host + std::string(location);
  const std::string_view path = from.target.substr(0, from.target.find('?'));
  return host + std::string(path.substr(0, path.rfind('/') + 1)) + std::string(location);
}

}  // namespace

Result<HttpReply> get_following(const std::string& what, std::string url, const HttpHeaders& headers,
                                const std::string& authorization, MutableBytes into, std::string* final_url) {
  constexpr int kMostRedirects = 5;
  const std::string own_host(split_http_url(url).host), own_scheme(split_http_url(url).scheme);
  for (int redirects = 0;; ++redirects) {
    const HttpUrl parts = split_http_url(url);
    HttpRequest request{.url = url, .headers = headers, .into = into, .ranged = !into.empty()};
    if (!authorization.empty() && parts.host == own_host && parts.scheme == own_scheme)
      request.headers.emplace_back("authorization", authorization);
    HttpReply reply = TRY(send_http(what, [&]() -> Result<HttpRequest> { return request; }));
    if (final_url) *final_url = url;
    const std::string_view location = reply.header("location");
    if (reply.status < 301 || reply.status > 308 || location.empty()) return reply;
    if (redirects == kMostRedirects) return io_error(what + ": the server redirects endlessly");
    std::string next = resolved(url, location);
    const std::string_view scheme = split_http_url(next).scheme;
    if ((scheme != "https" && scheme != "http") || (scheme == "http" && parts.scheme == "https"))
      return io_error(what + ": the server redirects to an unsafe URL");
    url = std::move(next);
  }
}

Result<bool> check_range(const HttpReply& reply, const StoredObject& object, Index offset) {
  constexpr const char* kChanged = "the object was replaced after it was opened; run the command again";
  if (reply.status == 412 || reply.status == 416) return io_error(kChanged);
  if (reply.status == 404) return io_error("the object was removed after it was opened");
  if (reply.status == 200)
    return io_error("the server does not support range requests; download the file, or use a server that does");
  if (reply.status != 206) return false;
  const std::string_view etag = reply.header("etag");
  const std::string begin = "bytes " + std::to_string(offset) + "-";
  if (!object.version.empty() && !etag.empty() && etag != object.version) return io_error(kChanged);
  if (const Index total = total_of(reply); total >= 0 && total != object.entry.size) return io_error(kChanged);
  if (!reply.header("content-range").starts_with(begin))
    return io_error("the server sent a different range of the file than requested");
  return true;
}

Index parse_time(std::string_view text) {
  std::tm utc{};
  const std::string whole(text);
  if (!::strptime(whole.c_str(), "%Y-%m-%dT%H:%M:%S", &utc) &&
      !::strptime(whole.c_str(), "%a, %d %b %Y %H:%M:%S", &utc))
    return 0;
  return static_cast<Index>(::timegm(&utc)) * 1'000'000'000;
}

std::optional<std::string> xml_text(std::string_view xml, std::string_view name) {
  std::optional<std::string> out;
  for_each_xml(xml, name, [&](std::string_view text) {
    if (!out) out = unescaped(text);
  });
  return out;
}

void for_each_xml(std::string_view xml, std::string_view name, const std::function<void(std::string_view)>& each) {
  const std::string open = "<" + std::string(name), close = "</" + std::string(name) + ">";
  while (true) {
    const std::size_t at = xml.find(open);
    if (at == std::string_view::npos) return;
    xml.remove_prefix(at + open.size());
    if (!xml.starts_with('>') && !xml.starts_with(' ')) continue;  // a longer name
    const std::size_t begin = xml.find('>'), end = xml.find(close);
    if (begin == std::string_view::npos || end == std::string_view::npos) return;
    if (begin < end) each(xml.substr(begin + 1, end - begin - 1));
    xml.remove_prefix(end + close.size());
  }
}

std::string status_text(const HttpReply& reply, std::string_view code, std::string_view message) {
  constexpr std::size_t kLongest = 200;
  std::string out = "HTTP " + std::to_string(reply.status);
  if (!code.empty()) out += " " + printable(code.substr(0, kLongest));
  if (!message.empty()) out += ": " + printable(message.substr(0, kLongest));
  return out;
}

Result<std::unique_ptr<Storage>> open_storage(const std::string& root) {
  TRY(open_http());
  if (is_bucket_url(root)) return open_bucket(root);
  return root.starts_with("hf://") ? open_hub(root) : open_web(root);
}

}  // namespace reshard
