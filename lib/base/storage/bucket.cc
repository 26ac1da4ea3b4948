// SPDX-License-Identifier: Apache-2.0
// Buckets of S3 and what speaks its protocol: MinIO, Ceph, Swift, R2, and Google's XML interface.
#include "lib/base/storage/bucket_client.h"
#include "lib/base/storage/bucket_writer.h"
#include "lib/base/storage/credentials.h"
#include "lib/base/storage/objects.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

// A listing may fail after its status was sent.
bool is_error_of_listing(const HttpReply& reply) {
  return reply.status == 200 && xml_text(reply.body, "Error").has_value();
}

class Bucket : public Storage {
 public:
  Bucket(std::string root, std::string name, S3Access access)
      : client_(std::move(root), std::move(name), std::move(access)) {}

  ObjectWriter* writer() override { return &writer_; }

  Result<Listing> list(const std::string& key, Depth depth) override {
    std::optional<Listing> out = TRY(list_pages(key, depth));
    if (!out && depth == Depth::kAllIfFew) out = TRY(list_pages(key, Depth::kOneLevel));
    if (!out) out.emplace().is_whole = false;
    return std::move(*out);
  }

  Result<std::optional<StoredObject>> stat(const std::string& key) override {
    std::byte first{};
    HttpHeaders range;
    add_range(range, 0, 1, "");
    const HttpReply reply = TRY(client_.send({.key = key, .headers = range, .into = {&first, 1}}));
    if (auto object = object_of(reply, base_name(key))) return object;
    const std::string code = client_.code_of(reply);
    if (reply.status == 404 && code != "NoSuchBucket") return std::optional<StoredObject>();
    if (reply.status == 403 && code == "AccessDenied" && !TRY(is_listed(key))) return std::optional<StoredObject>();
    return client_.error_of(reply).context(client_.root() + "/" + key);
  }

  Status read(const std::string& key, const StoredObject& object, Index offset, MutableBytes out) override {
    HttpHeaders range;
    add_range(range, offset, std::ssize(out), object.version);
    const HttpReply reply = TRY(client_.send({.key = key, .headers = range, .into = out}));
    if (!TRY(check_range(reply, object, offset))) return client_.error_of(reply);
    return {};
  }

 private:
  // Returns whether a listing shows the key. S3 denies access to objects that do not exist if the bucket may not be
  // listed, so that only this tells an object that may not be read from none.
  Result<bool> is_listed(const std::string& key) {
    const HttpReply reply =
        TRY(client_.send({.query = {{"list-type", "2"}, {"max-keys", "1"}, {"prefix", key}}}, is_error_of_listing));
    if (reply.status == 401 || reply.status == 403) return false;
    if (reply.status != 200) return client_.error_of(reply).context(client_.root() + "/" + key);
    return xml_text(reply.body, "Key") == key;
  }

  static constexpr std::size_t kMostDirectories = 4096;  // of a listing of all levels

  // Lists what `depth` says. Returns nothing if that takes more than one reply, except of one level, and of all levels
  // without directories; and if all levels have too many directories.
  Result<std::optional<Listing>> list_pages(const std::string& key, Depth depth) {
    Listing out;
    const std::string prefix = key.empty() ? "" : key + "/";
    BucketClient::Query query = {{"list-type", "2"}, {"prefix", prefix}};
    if (depth != Depth::kAllIfFew) query["delimiter"] = "/";
    while (true) {
      const HttpReply reply = TRY(client_.send({.query = query}, is_error_of_listing));
      if (reply.status == 403 && client_.code_of(reply) == "AccessDenied") {
        out.is_allowed = false;
        out.why_not =
            "listing is denied" + client_.by_whom() + "; or name a file that may be read, such as a model's index";
        return std::optional(std::move(out));
      }
      if (reply.status != 200) return client_.error_of(reply).context(client_.root() + "/" + key);
      if (reply.body.find("<ListBucketResult") == std::string::npos)
        return io_error(client_.root() + ": the endpoint answers, but not as S3 does");
      add_objects(reply.body, prefix, out);
      if (out.below.size() > kMostDirectories) return std::optional<Listing>();
      const auto next = xml_text(reply.body, "NextContinuationToken");
      const std::string is_truncated = xml_text(reply.body, "IsTruncated").value_or("");  // not all servers send it
      if (!next && is_truncated == "true")
        return io_error(client_.root() + ": the server ends a listing early and does not say how to continue");
      if (!next || next->empty() || is_truncated == "false") return std::optional(std::move(out));
      if (depth == Depth::kOneReply || !out.below.empty()) return std::optional<Listing>();
      query["continuation-token"] = *next;
    }
  }

  // Returns an ETag as headers have it. Some servers list it without quotes.
  static std::string quoted(const std::string& etag) {
    return etag.empty() || etag.ends_with('"') ? etag : '"' + etag + '"';
  }

  // Adds an object, or with an empty last component a directory, to the listings of the directories on its path.
  static void add_object(const std::string& path, StoredObject object, Listing& out) {
    std::vector<StoredObject>* to = &out.objects;
    std::size_t begin = 0;
    if (out.below.size() > kMostDirectories) return;
    for (std::size_t slash = path.find('/'); slash != std::string::npos; slash = path.find('/', begin)) {
      const auto [at, is_new] = out.below.try_emplace(path.substr(0, slash));
      if (is_new) to->push_back(directory_object(path.substr(begin, slash - begin)));
      to = &at->second;
      begin = slash + 1;
    }
    object.entry.name = path.substr(begin);
    if (!object.entry.name.empty()) to->push_back(std::move(object));
  }

  static void add_objects(std::string_view xml, const std::string& prefix, Listing& out) {
    const auto name_of = [&](const std::optional<std::string>& key) {
      return key && key->starts_with(prefix) ? key->substr(prefix.size()) : "";
    };
    for_each_xml(xml, "Contents", [&](std::string_view item) {
      const std::string name = name_of(xml_text(item, "Key"));
      if (name.empty()) return;  // the directory's own marker
      const auto size = parse_number(xml_text(item, "Size").value_or(""));
      add_object(name,
                 {{"", false, size.value_or(0), parse_time(xml_text(item, "LastModified").value_or(""))},
                  quoted(xml_text(item, "ETag").value_or(""))},
                 out);
    });
    for_each_xml(xml, "CommonPrefixes", [&](std::string_view item) {
      std::string name = name_of(xml_text(item, "Prefix"));
      if (name.ends_with('/')) name.pop_back();
      if (!name.empty()) out.objects.push_back(directory_object(std::move(name)));
    });
  }

  BucketClient client_;
  BucketWriter writer_{client_};
};

}  // namespace

Result<std::unique_ptr<Storage>> open_bucket(const std::string& root) {
  const std::string name = root.substr(5);
  if (name.empty()) return usage_error(root + ": expected a bucket, as in " + root + "bucket/directory");
  S3Access access = TRY(root.starts_with("s3://") ? s3_access() : gs_access());
  if (!access.endpoint.empty() && split_http_url(access.endpoint).host.empty())
    return usage_error("'" + printable(access.endpoint) +
                       "' is not an endpoint; expected a URL such as http://host:9000");
  return std::unique_ptr<Storage>(std::make_unique<Bucket>(root, name, std::move(access)));
}

}  // namespace reshard
