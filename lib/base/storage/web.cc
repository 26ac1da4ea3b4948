// SPDX-License-Identifier: Apache-2.0
// Files on web servers that support range requests, without credentials. Directories come from the server's own listing
// pages.
#include <algorithm>
#include <cctype>
#include <set>

#include "lib/base/parallel.h"
#include "lib/base/storage/objects.h"
#include "lib/base/storage/secret_query.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

// Like percent_encode(), but keeps existing escapes, because names come both from the user's URL and from files.
std::string encoded_once(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto is_hex = [&](std::size_t k) {
      return k < text.size() && std::isxdigit(static_cast<unsigned char>(text[k]));
    };
    if (text[i] == '%' && is_hex(i + 1) && is_hex(i + 2))
      out += '%';
    else
      out += percent_encode(text.substr(i, 1), true);
  }
  return out;
}

// Returns the decoded names that a listing page links to; those of directories end in a slash. Ignores links that lead
// elsewhere.
std::set<std::string> links_of(std::string_view page) {
  std::set<std::string> out;
  constexpr std::string_view kLink = "href=";
  for (std::size_t at = page.find(kLink); at != std::string_view::npos; at = page.find(kLink, at + 1)) {
    std::string_view rest = page.substr(at + kLink.size());
    if (rest.empty() || (rest[0] != '"' && rest[0] != '\'')) continue;
    const char quote = rest[0];
    rest.remove_prefix(1);
    const std::string_view target = rest.substr(0, rest.find(quote));
    std::string name = percent_decode(target.substr(target.starts_with("./") ? 2 : 0));
    for (std::size_t entity; (entity = name.find("&amp;")) != std::string::npos;) name.erase(entity + 1, 4);
    const std::string_view plain = std::string_view(name).substr(0, name.size() - (name.ends_with('/') ? 1 : 0));
    const bool is_name = is_usable_key(std::string(plain)) && plain.find_first_of("/:") == std::string_view::npos;
    if (is_name && target.find_first_of("?#") == std::string_view::npos) out.insert(std::move(name));
  }
  return out;
}

class WebServer : public Storage {
 public:
  explicit WebServer(std::string root) : root_(std::move(root)) {}

  Result<Listing> list(const std::string& key, Depth) override {
    const HttpReply reply = TRY(get_following(root_, url_of(key) + (key.empty() ? "" : "/"), {}, "", {}));
    Listing out;
    const bool is_page = reply.status == 200 && reply.header("content-type").starts_with("text/html");
    const std::set<std::string> links = is_page ? links_of(reply.body) : std::set<std::string>();
    if (is_temporary_failure(reply.status)) return error_of(reply).context(root_ + "/" + key);
    if (links.empty()) {
      out.is_allowed = false;
      const std::string status = status_text(reply, "", "");
      if (reply.status == 401 || reply.status == 403)
        out.why_not =
            "the server denies access (" + status + "); name a file that may be read, or give a presigned URL";
      else if (reply.status != 404 && reply.status != 410)
        out.why_not = "the server does not list its files (" + status +
                      "); name a file, such as a model's index or its safetensors file";
      return out;
    }
    std::vector<std::optional<StoredObject>> found(links.size());
    const std::vector<std::string> names(links.begin(), links.end());
    TRY(parallel_for(std::ssize(names), kMostRequests, [&](int, Index i) -> Status {
      const std::string& name = names[i];
      auto& to = found[i];
      if (name.ends_with('/'))
        to = directory_object(name.substr(0, name.size() - 1));
      else
        to = TRY(stat(path_join(key, name)));
      return {};
    }));
    for (auto& object : found)
      if (object) out.objects.push_back(std::move(*object));
    return out;
  }

  Result<std::optional<StoredObject>> stat(const std::string& key) override {
    std::byte first{};
    HttpHeaders range;
    add_range(range, 0, 1, "");
    std::string final_url;
    const HttpReply reply = TRY(get_following(root_, url_of(key), range, "", {&first, 1}, &final_url));
    auto object = object_of(reply, base_name(key));
    if (object && reply.status == 200 && final_url.ends_with('/')) {
      object->entry = {base_name(key), true, 0, 0};
      return object;
    }
    if (object) return object;
    if (reply.status == 404 || reply.status == 410 || reply.status == 403) return std::optional<StoredObject>();
    return error_of(reply).context(root_ + "/" + key);
  }

  Status read(const std::string& key, const StoredObject& object, Index offset, MutableBytes out) override {
    HttpHeaders range;
    add_range(range, offset, std::ssize(out), object.version);
    const HttpReply reply = TRY(get_following(root_, url_of(key), range, "", out));
    if (!TRY(check_range(reply, object, offset))) return error_of(reply);
    return {};
  }

 private:
  static Error error_of(const HttpReply& reply) {
    const std::string status = status_text(reply, "", "");
    if (is_temporary_failure(reply.status))
      return io_error(status + "; the server failed or is overloaded; try again later");
    return io_error(status + (reply.status == 401 ? "; the server wants a password, which reshard does not send" : ""));
  }

  std::string url_of(const std::string& key) const {
    return root_ + "/" + encoded_once(key) + secret_query_of(root_ + "/" + key);
  }

  const std::string root_;
};

}  // namespace

Result<std::unique_ptr<Storage>> open_web(const std::string& root) {
  if (split_http_url(root).host.empty())
    return usage_error(printable(root) + ": expected a host, as in https://host/directory");
  return std::unique_ptr<Storage>(std::make_unique<WebServer>(root));
}

}  // namespace reshard
