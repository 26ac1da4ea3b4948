// SPDX-License-Identifier: Apache-2.0
// Repositories of the Hugging Face hub: hf://org/model[@revision][/path]. The revision is resolved to a commit once, so
// all reads see the same version.
#include <algorithm>
#include <map>

#include "lib/base/json.h"
#include "lib/base/storage/credentials.h"
#include "lib/base/storage/objects.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

struct Repository {
  std::string kind = "models";  // "datasets", "spaces"
  std::string id, revision = "main";
};

Result<Repository> parse_repository(const std::string& root) {
  Repository out;
  std::string_view rest = std::string_view(root).substr(5);
  for (const std::string_view kind : {"datasets", "spaces"})
    if (std::string start = std::string(kind) + "/"; take(rest, start)) out.kind = kind;
  if (const std::size_t at = rest.find('@'); at != std::string_view::npos) {
    out.revision = percent_decode(rest.substr(at + 1));
    rest = rest.substr(0, at);
  }
  out.id = rest;
  const auto parts = split(out.id, '/');
  if (parts.size() != 2 || parts[0].empty() || parts[1].empty() || out.revision.empty())
    return usage_error(printable(root) + ": expected hf://organisation/model[@revision][/path]");
  return out;
}

// Returns the URL in a Link header, <https://...>; rel="next", or nothing if there is no next page.
std::string next_page(std::string_view link) {
  const std::size_t rel = link.find("rel=\"next\"");
  const std::size_t begin = rel == std::string_view::npos ? rel : link.rfind('<', rel);
  if (begin == std::string_view::npos) return {};
  return std::string(link.substr(begin + 1, link.find('>', begin) - begin - 1));
}

class Hub : public Storage {
 public:
  Hub(std::string root, Repository repository, HubAccess access)
      : root_(std::move(root)), repository_(std::move(repository)), access_(std::move(access)) {}

  // Resolves the revision to a commit and lists all files.
  Status open() {
    const std::string api = access_.endpoint + "/api/" + repository_.kind + "/" + percent_encode(repository_.id, true);
    const Json info = TRY(json_of(TRY(get(api + "/revision/" + percent_encode(repository_.revision, false)))));
    commit_ = TRY(info.get_string("sha").context(root_ + ": the hub's answer"));
    std::string page = api + "/tree/" + percent_encode(commit_, false) + "?recursive=true";
    while (!page.empty()) {
      const HttpReply reply = TRY(get(page));
      TRY(add_files(TRY(json_of(reply))).context(root_ + ": the hub's answer"));
      const std::string next = next_page(reply.header("link"));
      const bool is_own = split_http_url(next).host == split_http_url(access_.endpoint).host;
      page = is_own && next != page ? next : "";
    }
    return {};
  }

  Result<Listing> list(const std::string& key, Depth) override {
    Listing out;
    const std::string below = key.empty() ? "" : key + "/";
    for (auto at = files_.lower_bound(below); at != files_.end() && at->first.starts_with(below); ++at) {
      const std::string inside = at->first.substr(below.size());
      if (const std::size_t slash = inside.find('/'); slash != std::string::npos)
        out.objects.push_back(directory_object(inside.substr(0, slash)));
      else
        out.objects.push_back(at->second);
    }
    return out;
  }

  Result<std::optional<StoredObject>> stat(const std::string& key) override {
    const auto found = files_.find(key);
    return found == files_.end() ? std::optional<StoredObject>() : std::optional(found->second);
  }

  Status read(const std::string& key, const StoredObject& object, Index offset, MutableBytes out) override {
    HttpHeaders range;
    add_range(range, offset, std::ssize(out), "");
    StoredObject pinned = object;
    pinned.version.clear();  // the commit pins the version; ETags come from the servers behind the hub and may differ
    for (const bool may_be_old : {true, false}) {
      const std::string known = may_be_old ? location_of(key) : "";
      const std::string url = known.empty() ? url_of(key) : known;
      std::string final_url;
      const std::string token = known.empty() ? authorization() : "";
      const HttpReply reply = TRY(get_following(root_, url, range, token, out, &final_url));
      if (reply.status == 206 && known.empty()) keep_location(key, final_url);
      if (reply.status == 206 || known.empty()) {
        if (!TRY(check_range(reply, pinned, offset))) return error_of(reply);
        return {};
      }
    }
    return internal_error(root_ + ": a file was asked for twice");
  }

 private:
  std::string authorization() const { return access_.token.empty() ? "" : "Bearer " + access_.token; }

  std::string url_of(const std::string& key) const {
    const std::string kind = repository_.kind == "models" ? "" : repository_.kind + "/";
    return access_.endpoint + "/" + kind + percent_encode(repository_.id, true) + "/resolve/" +
           percent_encode(commit_, false) + "/" + percent_encode(key, true);
  }

  // Returns the URL to which the hub redirected the last request for this file. Such a URL is valid for about an hour.
  std::string location_of(const std::string& key) {
    const std::lock_guard lock(mutex_);
    const auto found = locations_.find(key);
    return found == locations_.end() ? "" : found->second;
  }
  void keep_location(const std::string& key, const std::string& url) {
    if (split_http_url(url).host == split_http_url(access_.endpoint).host) return;
    const std::lock_guard lock(mutex_);
    locations_[key] = url;
  }

  Result<HttpReply> get(const std::string& url) {
    HttpReply reply = TRY(get_following(root_, url, {}, authorization(), {}));
    if (reply.status != 200) return error_of(reply).context(root_);
    return reply;
  }

  Result<Json> json_of(const HttpReply& reply) const { return parse_json(reply.body, root_); }

  Status add_files(const Json& tree) {
    for (const Json& item : TRY(tree.as_array())) {
      const std::string path(TRY(item.get_string("path")));
      if (TRY(item.get_string("type")) != "file" || !is_usable_key(path)) continue;
      StoredObject object;
      const Index size = TRY(item.get_index("size"));
      object.entry = {base_name(path), false, size, 0};
      object.version = commit_;
      files_.emplace(path, std::move(object));
    }
    return {};
  }

  Error error_of(const HttpReply& reply) const {
    const std::string code(reply.header("x-error-code"));
    const std::string out = status_text(reply, code, "");
    const bool has_token = !access_.token.empty();
    if (code == "GatedRepo") return io_error(out + "; ask for access on the model's page, and set HF_TOKEN");
    if (code == "RevisionNotFound")
      return io_error(out + "; the repository has no revision '" + printable(repository_.revision) + "'");
    if (reply.status == 401 || reply.status == 403 || code == "RepoNotFound" || reply.status == 404)
      return io_error(out + (has_token ? "; there is no such repository, or the token may not read it"
                                       : "; there is no such repository, or it is private: set HF_TOKEN"));
    return io_error(out + "; the hub failed or is overloaded; try again later");
  }

  const std::string root_;
  const Repository repository_;
  const HubAccess access_;
  std::string commit_;
  std::map<std::string, StoredObject> files_;  // by path
  std::mutex mutex_;
  std::map<std::string, std::string> locations_;  // by path
};

}  // namespace

Result<std::unique_ptr<Storage>> open_hub(const std::string& root) {
  auto hub = std::make_unique<Hub>(root, TRY(parse_repository(root)), hub_access());
  TRY(hub->open());
  return std::unique_ptr<Storage>(std::move(hub));
}

}  // namespace reshard
