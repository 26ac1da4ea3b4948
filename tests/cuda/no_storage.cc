// The functions that lib/base/file.cc calls for URLs, for the benchmark, which opens none: it is compiled on machines
// without libcurl and without a JSON library.
#include "lib/base/storage/storage.h"

namespace reshard {
namespace {

Error no_storage(const std::string& url) { return unsupported(url + ": built without access to URLs"); }

}  // namespace

Result<std::shared_ptr<const StoredFile>> StoredFile::open(const std::string& url) { return no_storage(url); }
Status StoredFile::read_at(Index, MutableBytes) const { return no_storage(path_); }
Result<std::vector<DirectoryEntry>> list_stored(const std::string& url) { return no_storage(url); }
Result<std::optional<StoredObject>> find_stored(const std::string& url) { return no_storage(url); }

}  // namespace reshard
