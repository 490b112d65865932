// The floor: one thread on epoll that answers every frame at once with as many bytes as the daemon would.
//
//     echo SOCKET KIND:BYTES,KIND:BYTES,...
//
// BYTES is the length of the whole reply to requests of that kind (kind 0: to all that are not named).  Prints "ready"
// once it listens, and ends with its parent.
#define _GNU_SOURCE
#include <sys/epoll.h>

#include "frames.h"

enum { REPLY_MOST = 1 << 22, CHUNK = 1 << 18 };

typedef struct {
    int fd;
    cutter in;
} peer;

static uint8_t reply[REPLY_MOST], chunk[CHUNK];
static uint32_t reply_bytes[KINDS];

static void answer(int fd, uint32_t kind) {
    uint32_t bytes = reply_bytes[kind < KINDS && reply_bytes[kind] ? kind : 0], body = bytes - 4;
    memcpy(reply, &body, 4);
    for (uint32_t sent = 0; sent < bytes;) {
        ssize_t done = write(fd, reply + sent, bytes - sent);
        if (done <= 0) return;  // the reader has gone; its next read says so
        sent += (uint32_t)done;
    }
}

int main(int count, char **words) {
    if (count != 3) {
        fprintf(stderr, "usage: echo SOCKET KIND:BYTES,...\n");
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, 9);
    reply_bytes[0] = 16;
    for (char *each = strtok(words[2], ","); each; each = strtok(NULL, ",")) {
        unsigned kind, bytes;
        if (sscanf(each, "%u:%u", &kind, &bytes) != 2 || kind >= KINDS || bytes < 8 || bytes > REPLY_MOST) {
            fprintf(stderr, "not a reply: %s\n", each);
            return 2;
        }
        reply_bytes[kind] = bytes;
    }
    reply[4] = 0x92;  // as Done would begin
    reply[5] = 75;

    struct sockaddr_un address = address_of(words[1]);
    int listener = socket(AF_UNIX, SOCK_STREAM, 0), poll = epoll_create1(0);
    unlink(words[1]);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 256)) die("listen");
    struct epoll_event wish = {.events = EPOLLIN, .data.ptr = NULL}, events[64];
    epoll_ctl(poll, EPOLL_CTL_ADD, listener, &wish);
    printf("ready\n");
    fflush(stdout);

    for (;;) {
        int ready = epoll_wait(poll, events, 64, -1);
        for (int i = 0; i < ready; i++) {
            peer *p = events[i].data.ptr;
            if (!p) {
                p = calloc(1, sizeof *p);
                if (!p || (p->fd = accept(listener, NULL, NULL)) < 0) die("accept");
                wish.data.ptr = p;
                epoll_ctl(poll, EPOLL_CTL_ADD, p->fd, &wish);
                continue;
            }
            ssize_t got = read(p->fd, chunk, sizeof chunk);
            if (got <= 0) {
                close(p->fd);
                free(p);
                continue;
            }
            for (size_t at = 0; at < (size_t)got;) {
                int whole;
                at += cut(&p->in, chunk + at, (size_t)got - at, &whole);
                if (whole) answer(p->fd, p->in.head[number_at(p->in.head) + 1]);
            }
        }
    }
}
